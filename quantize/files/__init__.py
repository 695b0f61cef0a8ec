"""Files of a draft folder: headers and bytes, read and written. Knows names, no meaning."""
