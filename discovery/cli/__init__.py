"""`mxjax discover`."""
