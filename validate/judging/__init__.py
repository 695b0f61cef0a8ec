"""May a draft replace its baseline? Checks of the evidence, the rules, and one verdict."""
