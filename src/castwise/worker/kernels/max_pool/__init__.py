"""MaxPool2d that remembers places in a byte."""
