cp -r docs/examples/fa2_pairs flash_versions/versions/
sed -i 's/fa1, fa2, fa3, fa4/fa1, fa2, fa2_pairs, fa3, fa4/' flash_versions/versions/api.py
