"use strict";
// Heat maps and the score matrix on canvases.
const draw = (() => {
  const CIVIDIS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 183, 101], [254, 232, 56]];
  const DIVERGING = [[0, 90, 160], [110, 180, 225], [246, 246, 246], [240, 180, 90], [200, 90, 0]];
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function mix(stops, x) {
    const place = Math.max(0, Math.min(1, x)) * (stops.length - 1), i = Math.min(Math.floor(place), stops.length - 2);
    const [a, b] = [stops[i], stops[i + 1]];
    return `rgb(${a.map((from, c) => Math.round(from + (b[c] - from) * (place - i))).join(",")})`;
  }

  // A canvas of the width that it has on the page and a height, with sharp pixels: its context.
  function context(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const made = canvas.getContext("2d");
    made.scale(ratio, ratio);
    return [made, width];
  }

  // Where the colours of some numbers begin and end.
  function limits(arrays, signed) {
    const all = arrays.flat(3).filter(x => x !== null && x !== undefined).sort((a, b) => a - b);
    if (!all.length) return [0, 1];
    const low = all[Math.floor(0.02 * (all.length - 1))], high = all[Math.ceil(0.98 * (all.length - 1))];
    if (!signed) return low == high ? [low - 1, high] : [low, high];
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return [-most, most];
  }

  function cell(ctx, value, [low, high], signed, x, y, width, height) {
    if (value === null) {
      ctx.fillStyle = colour("empty");
      ctx.fillRect(x, y, width, height);
      ctx.strokeStyle = colour("hatch");
      ctx.beginPath();
      ctx.moveTo(x, y + height);
      ctx.lineTo(x + width, y);
      ctx.stroke();
      return;
    }
    ctx.fillStyle = mix(signed ? DIVERGING : CIVIDIS, (value - low) / (high - low));
    ctx.fillRect(x, y, width + 0.3, height + 0.3);
  }

  // An array as a heat map; a list of numbers is a column. With few cells, numbers are written.
  function heat(canvas, values, range, signed, height) {
    const [ctx, width] = context(canvas, height);
    ctx.fillStyle = colour("empty");
    ctx.fillRect(0, 0, width, height);
    if (!values) return;
    const rows = values.map(row => (Array.isArray(row) ? row : [row]));
    const w = width / rows[0].length, h = height / rows.length;
    const seen = rows[0].length == 1;
    rows.forEach((row, i) => row.forEach((value, j) => {
      cell(ctx, value, range, signed, j * w, i * h, w, h);
      if (!seen || h < 11) return;
      const light = value === null || (value - range[0]) / (range[1] - range[0]) > 0.55;
      ctx.fillStyle = value === null ? colour("ink") : light ? "#111" : "#fff";
      ctx.font = "11px system-ui, sans-serif";
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillText(value === null ? "−∞" : value.toFixed(2), width / 2, (i + 0.5) * h);
    }));
  }

  // S with Q on its left, K and V above it and O on its right; `now` names what is on the chip.
  function matrix(canvas, found, state, range, outputs, now) {
    const scale = found.cell, { queries, keys } = found.call;
    const rows = queries / scale, columns = keys / scale;
    const room = 46, outputWidth = 40, unit = (canvas.clientWidth - 2 * room - outputWidth + 10) / Math.max(rows, columns);
    const top = 52, [ctx] = context(canvas, top + unit * rows + 22);
    const left = room, right = left + unit * columns + 8;
    ctx.font = "12px system-ui, sans-serif";
    ctx.textAlign = "center";
    const label = (text, x, y) => { ctx.fillStyle = colour("soft"); ctx.fillText(text, x, y); };
    const box = (x, y, w, h, fill) => {
      ctx.fillStyle = fill ? colour(fill) : colour("empty");
      ctx.fillRect(x, y, w, h);
      ctx.strokeStyle = colour("back");
      ctx.lineWidth = 1;
      ctx.strokeRect(x, y, w, h);
    };
    const q = found.call.block_q / scale, kv = found.call.block_kv / scale;
    for (let c = 0; c * kv < columns; c++) {
      const w = unit * Math.min(kv, columns - c * kv), x = left + c * kv * unit;
      box(x, 6, w, 16, now.v.includes(c) && "v");
      box(x, 28, w, 16, now.k.includes(c) && "k");
    }
    for (let r = 0; r * q < rows; r++) {
      const h = unit * Math.min(q, rows - r * q), y = top + r * q * unit;
      box(left - 26, y, 18, h, now.q.includes(r) && "q");
    }
    label("V", left - 17, 19);
    label("K", left - 17, 41);
    label("Q", left - 35, top + unit * rows / 2);
    label("O", right + outputWidth + 10, top + unit * rows / 2);
    label("S: queries down, keys across", left + unit * columns / 2, top + unit * rows + 16);
    ctx.fillStyle = colour("empty");
    ctx.fillRect(left, top, unit * columns, unit * rows);
    ctx.fillRect(right, top, outputWidth, unit * rows);
    const clip = (row, i, size) => row + i < size;
    for (const tile of state.tiles) {
      ctx.globalAlpha = now.tiles.includes(tile) ? 1 : 0.3;
      tile.values.forEach((row, i) => row.forEach((value, j) => {
        if (clip(tile.row, i, rows) && clip(tile.column, j, columns))
          cell(ctx, value, range, false, left + (tile.column + j) * unit, top + (tile.row + i) * unit, unit, unit);
      }));
    }
    ctx.globalAlpha = 1;
    for (const part of state.rows)
      part.values.forEach((row, i) => {
        if (!clip(part.row, i, rows)) return;
        row.forEach((value, j) => cell(ctx, value, outputs, true, right + j * outputWidth / row.length, top + (part.row + i) * unit, outputWidth / row.length, unit));
      });
    for (const tile of now.tiles) {
      const h = Math.min(tile.values.length, rows - tile.row), w = Math.min(tile.values[0].length, columns - tile.column);
      ctx.strokeStyle = colour(now.tiles.length > 1 && tile.owner ? "o" : "k");
      ctx.lineWidth = 3;
      ctx.strokeRect(left + tile.column * unit, top + tile.row * unit, w * unit, h * unit);
    }
  }

  return { heat, matrix, limits, context, colour };
})();
