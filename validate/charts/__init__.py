"""Charts as SVG inside a page: numbers and words in, marks out. They know neither drafts nor files.

Colours and fonts are the page's (`look.css`): a chart names what a mark is, not how it looks. What
colour tells, shape or line style tells too.
"""
