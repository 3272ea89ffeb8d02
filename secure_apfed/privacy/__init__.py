"""Protecting representations and labels, and saying exactly what that gives.

Guards clip and add noise before anything is sent (`guard.GUARDS`); accountants turn what was done
into epsilon (`accountants.ACCOUNTANTS`); the `ledger` is charged before each release. Under DP-SGD
the active's updates are private as well (`dp_sgd`), `contributions` has discrete noise under a sum.
Label mechanisms answer for the active's training labels (`randomised_response.LABEL_MECHANISMS`).
"""
