"""What `ascend_ops` is made of."""
