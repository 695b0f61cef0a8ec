"""What drafts accept: counted along recorded text, added up by prompt, with bounds of a change."""
