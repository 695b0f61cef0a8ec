"""The reading side: what a folder declares and stores, decoded without any code of the writer."""
