"""Process groups, collectives and all that talks between ranks; the CPU backend among it."""
