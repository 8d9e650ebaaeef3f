"""A tiny DeepSeek-V4.1 and its DSpark head, trained: what speculation is measured on where drafts must be real."""
