"""What plan_cluster.py is made of: predictions, measurements on ranks of this machine, and refusals."""
