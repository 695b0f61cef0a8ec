"""Charts as SVG inside a page, drawn from numbers and words. They know neither drafts nor files.

Colours and fonts come from the page (`look.css`): a chart names what a mark is, not how it looks.
Shape or line style always repeats what colour shows.
"""
