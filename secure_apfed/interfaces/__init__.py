"""Ways in from Python: own networks, scikit-learn estimators, data frames."""
