"""What fuzz.py does: damaged files through every loader, random requests through every entry, and what came of it.

`formats` is the table of all that is damaged: `seeds` and `tokenizer_seeds` make the undamaged files, `mutators` and
`binary_mutators` damage them, `loaders` load them, `oracles` say whether that is right. `cases` makes inputs of a seed.
`worker` runs them under limits, watched by `guard`; `supervisor` runs workers, `minimise` shrinks what they find, and
`findings` keeps it. `guided` has atheris choose the inputs. `random_requests` and `company` are about requests.
"""
