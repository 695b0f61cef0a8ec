"""The gate's report: as JSON that is read again, as a page, as Markdown, as JUnit."""
