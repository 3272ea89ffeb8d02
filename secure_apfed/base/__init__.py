"""The base of all packages: bounded reading of files, formats, seeds, names, peers'
text, progress.
"""
