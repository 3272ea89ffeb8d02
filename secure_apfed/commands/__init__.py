"""Commands: parts of the command line, put together by `secure_apfed.cli`."""
