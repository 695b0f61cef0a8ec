"""Reading and writing the files of a draft folder: headers and bytes, without their meaning."""
