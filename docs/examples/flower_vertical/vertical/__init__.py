"""Three hosts have ten columns each of the same patients; the server has the diagnoses.

In each step a host sends its scores under masks. The server reads their sum, and sends the residual
back. Who reads a host's folder has its role.
"""
