"""Plugins that an engine loads if draftquant is installed with it; nothing else imports them."""
