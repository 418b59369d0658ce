// Drawings of the plan's data, as SVG. Every text is a text node; attributes are numbers and our own names.

const SVG = "http://www.w3.org/2000/svg";
const CELL = { width: 62, height: 44, gap: 8 };
const FRAME = { pad: 10, head: 22, gap: 16 };
const WIDEST = 660;
const COLOURS = 8;

export function node(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function label(x, y, text, kind, anchor = "middle") {
  return node("text", { x, y, class: kind, "text-anchor": anchor }, String(text));
}

function picture(width, height, title, ...children) {
  const drawn = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  drawn.setAttribute("aria-label", title);
  drawn.append(...children);
  return drawn;
}

function rankCell(rank, x, y, colour) {
  const place = `${rank.attn_dp} · ${rank.attn_cp} · ${rank.attn_tp}`;
  const words = `rank ${rank.rank}: attention DP ${rank.attn_dp}, CP ${rank.attn_cp}, TP ${rank.attn_tp}`;
  return node(
    "g", { class: `rank c${colour}` },
    node("title", {}, words),
    node("rect", { x, y, width: CELL.width, height: CELL.height, rx: 6 }),
    label(x + CELL.width / 2, y + 21, rank.rank, "number"),
    label(x + CELL.width / 2, y + 36, place, "place"),
  );
}

// The ranks of one attention DP rank: a row, or several, for each CP rank.
function frameOf(ranks, title, colourOf) {
  const tp = Math.max(...ranks.map((rank) => rank.attn_tp)) + 1;
  const columns = Math.min(tp, 8);
  const rowsOfOne = Math.ceil(tp / columns);
  const cells = ranks.map((rank) => {
    const column = rank.attn_tp % columns;
    const row = rank.attn_cp * rowsOfOne + Math.floor(rank.attn_tp / columns);
    const x = FRAME.pad + column * (CELL.width + CELL.gap);
    const y = FRAME.head + FRAME.pad + row * (CELL.height + CELL.gap);
    return rankCell(rank, x, y, colourOf(rank.rank));
  });
  const rows = (Math.max(...ranks.map((rank) => rank.attn_cp)) + 1) * rowsOfOne;
  const width = 2 * FRAME.pad + columns * (CELL.width + CELL.gap) - CELL.gap;
  const height = FRAME.head + 2 * FRAME.pad + rows * (CELL.height + CELL.gap) - CELL.gap;
  const least = Math.max(width, 120);
  const box = node("rect", { class: "frame", x: 0.5, y: 0.5, width: least - 1, height: height - 1, rx: 9 });
  return { width: least, height, parts: [box, label(FRAME.pad, 20, title, "head", "start"), ...cells] };
}

export function drawMesh(mesh, group) {
  const index = new Map();
  (group?.groups ?? []).forEach((ranks, at) => ranks.forEach((rank) => index.set(rank, at % COLOURS)));
  const colourOf = (rank) => index.get(rank) ?? 0;
  const stages = new Set(mesh.ranks.map((rank) => rank.stage));
  const frames = new Map();
  for (const rank of mesh.ranks) {
    const key = `${rank.stage} ${rank.attn_dp}`;
    frames.set(key, [...(frames.get(key) ?? []), rank]);
  }
  const placed = [];
  let x = 0, y = 0, tallest = 0, widest = 0;
  for (const ranks of frames.values()) {
    const stage = stages.size > 1 ? `pipeline ${ranks[0].stage}, ` : "";
    const made = frameOf(ranks, `${stage}attention DP ${ranks[0].attn_dp}`, colourOf);
    if (x > 0 && x + made.width > WIDEST) { x = 0; y += tallest + FRAME.gap; tallest = 0; }
    placed.push(node("g", { transform: `translate(${x} ${y})` }, ...made.parts));
    x += made.width + FRAME.gap;
    tallest = Math.max(tallest, made.height);
    widest = Math.max(widest, x - FRAME.gap);
  }
  const coloured = group === null ? "" : `, coloured by ${group.name}`;
  return picture(widest, y + tallest, `mesh of ${mesh.ranks.length} ranks${coloured}`, ...placed);
}

export function drawPipeline(stages) {
  const layers = stages[stages.length - 1].end;
  const width = 900, left = 96, right = 110, gap = 26, top = 8, height = 74;
  const room = width - left - right - gap * (stages.length - 1);
  const parts = [label(left - 14, top + 42, "embedding →", "note", "end")];
  let x = left;
  stages.forEach((stage, at) => {
    const count = stage.end - stage.first;
    const wide = (room * count) / layers;
    const ticks = [];
    for (let layer = 1; layer < count && count <= 128; layer += 1) {
      const tick = x + (wide * layer) / count;
      ticks.push(node("line", { class: "tick", x1: tick, x2: tick, y1: top + height - 14, y2: top + height - 4 }));
    }
    const ranks = stage.ranks.length > 1 ? `ranks ${stage.ranks[0]}–${stage.ranks[stage.ranks.length - 1]}` : `rank ${stage.ranks[0]}`;
    parts.push(node(
      "g", { class: `stage c${at % COLOURS}` },
      node("rect", { x, y: top, width: wide, height, rx: 8 }),
      label(x + wide / 2, top + 24, `stage ${at} · ${ranks}`, "number"),
      label(x + wide / 2, top + 44, `layers ${stage.first}–${stage.end - 1}`, "place"),
      ...ticks,
    ));
    const time = label(x + wide / 2, top + height + 20, "", "note");
    time.id = `stage-time-${at}`;
    parts.push(time);
    x += wide;
    if (at < stages.length - 1) {
      parts.push(node("line", { class: "cut", x1: x + gap / 2, x2: x + gap / 2, y1: 0, y2: top + height + 8 }));
      parts.push(label(x + gap / 2, top + height + 22, "cut", "note"));
    }
    x += gap;
  });
  parts.push(label(width - right + 14, top + 42, "→ norm, head", "note", "start"));
  const words = `${stages.length} pipeline stage${stages.length > 1 ? "s" : ""} over ${layers} layers`;
  return picture(width, top + height + 30, words, ...parts);
}

const BOX = { width: 112, height: 52, step: 250, top: 40, left: 8 };

function edgeOf(line, from, to, at) {
  const middle = BOX.top + BOX.height / 2;
  const words = ["no collective", "1 collective"][line.collectives] ?? `${line.collectives} collectives`;
  const kind = line.collectives > 0 ? "edge busy" : "edge";
  const start = BOX.left + from * BOX.step + BOX.width;
  const end = BOX.left + to * BOX.step;
  const parts = [node("title", {}, line.reason)];
  if (to === from + 1) {
    parts.push(node("path", { d: `M${start} ${middle}H${end - 7}`, "marker-end": "url(#tip)" }));
    parts.push(label((start + end) / 2, middle - 9, `×${line.times}`, "count"));
    parts.push(label((start + end) / 2, middle + 19, words, "place"));
  } else {
    const x1 = BOX.left + from * BOX.step + BOX.width / 2, x2 = BOX.left + to * BOX.step + BOX.width / 2;
    const bottom = BOX.top + BOX.height, low = bottom + 40 + 26 * at;
    const side = x2 < x1 ? -14 : 14;
    parts.push(node("path", {
      d: `M${x1} ${bottom}C${x1} ${low + 10} ${x1 + side} ${low} ${x1 + 3 * side} ${low}H${x2 - 3 * side}C${x2 - side} ${low} ${x2} ${low + 10} ${x2} ${bottom + 7}`,
      "marker-end": "url(#tip)",
    }));
    parts.push(label((x1 + x2) / 2, low - 7, `×${line.times}`, "count"));
    parts.push(label((x1 + x2) / 2, low + 17, words, "place"));
  }
  return node("g", { class: kind }, ...parts);
}

export function drawLayer(lines) {
  const boundaries = lines.filter((line) => line.is_boundary);
  const names = [...new Set(boundaries.flatMap((line) => line.name.split(" -> ")))];
  // The planner's names of what computes outside of layers, and the ends of the stack they belong to.
  const ends = { embedding: "embed", head: "norm" };
  let bows = 0;
  const edges = boundaries.map((line) => {
    const [from, to] = line.name.split(" -> ").map((name) => names.indexOf(name));
    return edgeOf(line, from, to, to === from + 1 ? 0 : bows++);
  });
  const boxes = names.map((name, at) => {
    const x = BOX.left + at * BOX.step;
    const own = lines.filter((line) => !line.is_boundary && (ends[line.name] ?? line.name) === name);
    const texts = [...new Set(own.flatMap((line) => line.early))];
    return node(
      "g", { class: "box" },
      node("rect", { x, y: BOX.top, width: BOX.width, height: BOX.height, rx: 8 }),
      label(x + BOX.width / 2, BOX.top + 31, name, "number"),
      label(x + BOX.width / 2, BOX.top - 10, texts.join(", "), "place"),
    );
  });
  const tip = node("marker", { id: "tip", viewBox: "0 0 8 8", refX: 1, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto", markerUnits: "userSpaceOnUse" }, node("path", { d: "M0 0L8 4L0 8Z" }));
  const width = 2 * BOX.left + (names.length - 1) * BOX.step + BOX.width;
  const height = BOX.top + BOX.height + 70 + 26 * Math.max(0, bows - 1);
  return picture(width, height, `stages ${names.join(", ")} and the boundaries between them`, node("defs", {}, tip), ...edges, ...boxes);
}
