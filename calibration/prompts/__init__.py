"""Reading prompt files in the forms that users have."""
