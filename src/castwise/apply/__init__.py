"""The one applier: a precision and techniques on a model, its optimizer and the loop around them."""
