"""Set intersection with correlations dealt ahead: a vector OLE, a key-value store, one hash."""
