"""Measures of model quality: the table of measures, intervals over test rows, tasks."""
