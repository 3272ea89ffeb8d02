"""What an active reads out of the sums, honest or not, and what each rule of the protocol stops.

`python -m apfed_experiments.leaks [--only PART] [--json]`.
"""
