"""Plugins that an engine loads if draftquant is installed beside it; nothing else imports them."""
