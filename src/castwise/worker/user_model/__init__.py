"""The user's own model: loaded, checked and adapted to a `Task`."""
