"""What a command says: `messages` on stderr, in the words of a shell; on stdout a `report`, or results in a file."""
