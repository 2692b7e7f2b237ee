"""The user's model: loaded, checked and adapted to a `Task`."""
