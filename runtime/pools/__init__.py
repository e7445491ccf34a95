"""Memory and ids of one replica's sequences; knows slots, not requests."""
