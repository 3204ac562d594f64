"""One model on several ranks, processes of one host or more: parts, messages, start, end."""
