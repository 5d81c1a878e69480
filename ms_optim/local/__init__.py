"""Local steps between exchanges: what is kept, who sends what when, and the outer step."""
