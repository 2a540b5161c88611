"""`mxjax reproduce`: the paper's tables as data, and the driver that makes them."""
