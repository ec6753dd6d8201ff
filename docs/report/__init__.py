"""Write the tables of committed results into the documents."""
