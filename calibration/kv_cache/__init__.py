"""The scales under which a draft's keys and values are kept in FP8, measured along traces."""
