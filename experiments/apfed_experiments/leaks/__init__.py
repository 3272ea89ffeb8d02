"""What an active reads out of the sums, honest or not, and what each rule of the protocol stops.

`secure-apfed study leaks` plays `leaks.parts`.
"""
