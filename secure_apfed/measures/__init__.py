"""How good a model is: the table of measures, intervals over test rows, tasks."""
