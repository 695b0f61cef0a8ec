"""May a draft replace its baseline? What is looked at before, the rules, and one verdict."""
