"""What fuzz.py does: damaged files through every loader, random requests through every entry, and what came of it.

`mutators` and `binary_mutators` damage bytes, `formats` says what there is to damage and how it is loaded, `oracles`
whether what was loaded is right. `worker` runs inputs under limits, `supervisor` runs workers, `minimise` shrinks what
they find. `random_requests` and `company` are about requests. `coverage` runs atheris on the parsers.
"""
