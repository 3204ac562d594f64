"""Settings for every test."""

from hypothesis import settings

# A first example may wait for a kernel to compile, so no deadline.
settings.register_profile("tinygpt", deadline=None, print_blob=True)
settings.load_profile("tinygpt")
