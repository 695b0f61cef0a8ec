"""What of docs/ is made from code and measured figures: reference pages and pictures."""
