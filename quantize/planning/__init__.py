"""Planning: a recipe applied to a draft's headers. Pure: it reads no data."""
