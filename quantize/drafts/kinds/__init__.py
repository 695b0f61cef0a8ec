"""What kinds of draft there are: what each computes, and its passes along recorded tokens."""
