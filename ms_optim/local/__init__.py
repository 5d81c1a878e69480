"""Local steps between exchanges: what is kept, what workers send and when, and the outer step."""
