"""One module for each architecture: which parameters it has, their shapes, and the names that files give them.

Belongs here: tables of names. No file is opened here. May import the model's config and errors alone.
"""
