"""What the gate found, as a run of an experiment tracker."""
