"""Images of prompts: from a row's column to the pixels of patches that a vision tower reads."""
