"""The embedded model, the grammar that wrote its training text, and the code that trains it."""
