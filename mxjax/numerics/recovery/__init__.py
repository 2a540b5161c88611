"""Stage III, structural recovery: attention and MLP coefficients in closed form."""
