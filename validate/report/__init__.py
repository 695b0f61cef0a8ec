"""The gate's report: JSON that can be read again, a page, Markdown and JUnit."""
