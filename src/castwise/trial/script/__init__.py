"""The user's training script as it is: run, hooked, and in another precision than its own."""
