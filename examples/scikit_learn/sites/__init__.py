"""Sites that train with scikit-learn."""
